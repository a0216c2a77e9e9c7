"""From the fields of a body to a Request."""
