"""Memory of saved tensors: on the device, recomputed, on the host, or on a peer."""
