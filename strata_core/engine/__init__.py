"""From a model on disk to rounds: assemble, prompt, step, and the thread that runs them."""
