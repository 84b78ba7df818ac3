"""What plugin authors test with: tiny checkpoints, dummy plugins, fault injection."""
