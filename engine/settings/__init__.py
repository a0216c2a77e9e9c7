"""The settings of the engine: declared once, read from the names of other servers too."""
