"""What a process sees, published; and whether two processes can exchange memory, decided before they try."""
