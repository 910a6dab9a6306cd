"""KV-Runahead on CPU cores: groups with very long prefixes on replicas of one core each."""
