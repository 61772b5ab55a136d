"""`shardfield doctor`: check a machine, a launcher and the links between ranks, and say how to mend what is wrong."""
