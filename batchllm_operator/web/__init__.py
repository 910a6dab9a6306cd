"""Pages in Airflow's web interface: the jobs, a run's live progress, and its report (ADR 22).

Every process of Airflow loads the plugin, so importing this package doesn't import the pages:
`plugin` does so at the first request.
"""
