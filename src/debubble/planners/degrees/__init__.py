"""The search of degrees: how a model and a global batch are best divided over all devices of a cluster."""
