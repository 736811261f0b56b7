"""The one forward pass that training, probing and serving share. The only part of core that imports torch."""
