"""Reports about runs and data, for people and programs: text, pages, charts."""
