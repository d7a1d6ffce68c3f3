"""What is trained: adapters or a full copy, its optimizer, and its state as tensors."""
