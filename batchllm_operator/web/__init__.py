"""Pages in Airflow's web interface: the jobs, a run while it goes on, and its report (ADR 22).

Every process of Airflow loads the plugin, so this package imports nothing of the pages: `plugin`
does so when the first of them is asked for.
"""
