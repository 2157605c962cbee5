select pg_sleep(60);
