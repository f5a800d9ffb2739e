"""Weights of 4 and 8 bits as the kernels read them: packing.py says how they lie, product.py multiplies by them."""
