"""Tools that show what a sharded program does: explain, strict, lockstep, parity."""
