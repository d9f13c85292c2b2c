"""Pictures: the shared panels and axes, colours and names, packings."""
