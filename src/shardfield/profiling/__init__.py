"""`shardfield profile`: where the time of a training step goes, by module, op and message, on every rank."""
