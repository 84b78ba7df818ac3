"""Setting Strata's speed beside another program's, in turn, on the same file."""
