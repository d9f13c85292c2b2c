"""Published rule-based methods, one file each, and the methods that PyTorch itself offers."""
