"""Where saved tensors are: on the device, recomputed, on the host, or on a peer."""
