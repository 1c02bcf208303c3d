"""Parameters in memory and in files."""
