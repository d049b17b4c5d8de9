"""Many runs that answer a question: study files, matching, tuning, cells, statistics, statements."""
