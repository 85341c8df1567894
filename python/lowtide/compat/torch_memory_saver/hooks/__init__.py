"""The hook modes. Both allocate through lowtide."""
