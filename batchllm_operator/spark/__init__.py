"""Plans and commits of tables that outgrow one machine (ADR 36).

The only room that imports pyspark.
Spark moves rows, sorts them and repeats what failed; all else is the code that works without it.
"""
