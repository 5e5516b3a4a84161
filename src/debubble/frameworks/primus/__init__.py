"""AMD Primus: target, export and import."""
