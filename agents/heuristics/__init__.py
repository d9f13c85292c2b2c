"""Published methods that decide by rules, one file each, and what PyTorch itself offers."""
