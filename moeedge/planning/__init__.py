"""What a model will take and what fits, before anything of it is loaded."""
