"""Shipped recipes and their data. A package only so that they are found wherever it is installed."""
