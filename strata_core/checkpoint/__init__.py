"""Reading models: GGUF files and hub-layout folders, tensor names to roles, weight types."""
