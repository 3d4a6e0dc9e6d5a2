"""Which device holds experts: what the user names, what llama.cpp and the driver offer, and how much fits."""
