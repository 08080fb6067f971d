"""Draft with block-diffusion networks: DFlash, DDTree, and the heads on them."""
