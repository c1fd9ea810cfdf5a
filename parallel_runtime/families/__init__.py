"""What is left here waits for the engine to have the plans of diffusers' transformers."""
