"""Shipped recipes and their data; a package so that they are found wherever it is installed."""
