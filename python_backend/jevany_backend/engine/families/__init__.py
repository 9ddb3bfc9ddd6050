"""A flat forward pass for each family of bases, over packed weights."""
