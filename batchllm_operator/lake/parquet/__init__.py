"""Hive-partitioned Parquet tables."""
