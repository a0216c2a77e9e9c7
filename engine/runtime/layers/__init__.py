"""Linear layers and the operations between them, on every device."""
