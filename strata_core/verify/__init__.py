"""The proof that tokens do not depend on where experts lie, made on the machine it is for."""
