"""Starting on devices: the phases, the order that a policy gives them, and what went wrong."""
