"""Look inside a model: record which experts its tokens use, and say how predictable they are."""
