"""The objects that user code works with: locks and leases, and the functions for operators."""
