"""What goes where: pure byte arithmetic, made before anything is allocated."""
