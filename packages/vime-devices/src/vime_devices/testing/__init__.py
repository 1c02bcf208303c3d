"""A fake HIP runtime for tests of programs that share device memory."""
