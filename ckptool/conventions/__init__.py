"""What the world calls things: models in a tree, names of optimizer states, adapters, quantized weights."""
