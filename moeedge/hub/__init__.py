"""Models by name: the catalog, the hub's cache on this machine, and downloads into it."""
