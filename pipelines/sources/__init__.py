"""Where prefixes come from: one module per kind of data."""
