"""Who is let in: pure, without I/O and without a clock."""
