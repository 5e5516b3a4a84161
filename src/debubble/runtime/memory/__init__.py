"""Memory of saved activations: on the device, recomputed, offloaded to the host or to a peer."""
