"""The expert cache in device memory: which experts, where they lie, and how they get there."""
