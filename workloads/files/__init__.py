"""Reading of files: their place under a data root, the cells of columns, the cache of decoded data."""
