"""Low-rank adapters: read from any naming scheme into one representation, and merged into the weights they are for."""
