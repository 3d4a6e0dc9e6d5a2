"""Which device holds experts: the value of -dev, what llama.cpp and the driver offer, and how much memory is free."""
