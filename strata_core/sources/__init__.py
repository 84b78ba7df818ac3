"""Where experts come from: a resident arena, or the mapped file."""
