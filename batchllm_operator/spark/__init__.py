"""Plans and commits of tables that outgrow one machine (ADR 36). Only this room imports pyspark."""
