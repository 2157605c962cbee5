package compat

import (
	"context"
	"database/sql"
	"testing"

	"xorm.io/xorm"
	"xorm.io/xorm/core"
	"xorm.io/xorm/log"

	"github.com/pgxgated/pgxgated"
	"github.com/pgxgated/pgxgated/integration/pgtest"
)

const libXorm = "xorm"

type xormItem struct {
	ID   int64  `xorm:"pk autoincr 'id'"`
	Name string `xorm:"notnull unique"`
}

func openXorm(dsn string) (*xorm.Engine, error) {
	db, err := sql.Open(pgxgated.DriverName, dsn)
	if err != nil {
		return nil, err
	}
	e, err := xorm.NewEngineWithDB("pgx", dsn, core.FromDB(db))
	if err != nil {
		return nil, err
	}
	e.SetLogLevel(log.LOG_OFF)
	return e, nil
}

func TestC05Xorm(t *testing.T) {
	suite(t, libXorm, func(t *testing.T, dsn string) *client {
		e := must(openXorm(dsn))(t)
		if err := e.Sync(&xormItem{}); err != nil {
			t.Fatal(err)
		}
		n := counter()
		return &client{db: e.DB().DB, close: e.Close, actions: []action{
			{"Insert", 1, 0, func(ctx context.Context) error {
				_, err := e.Context(ctx).Insert(&xormItem{Name: n()})
				return err
			}},
			{"Find", 1, 0, func(ctx context.Context) error {
				var its []xormItem
				return e.Context(ctx).Where("name <> ?", "x").Find(&its)
			}},
			{"Begin with two statements", 1, 1, func(ctx context.Context) error {
				s := e.NewSession().Context(ctx)
				defer s.Close()
				if err := s.Begin(); err != nil {
					return err
				}
				it := xormItem{Name: n()}
				if _, err := s.Insert(&it); err != nil {
					return err
				}
				if _, err := s.ID(it.ID).Update(&xormItem{Name: n()}); err != nil {
					return err
				}
				return s.Commit()
			}},
		}, slow: []action{
			{name: "Query", run: func(ctx context.Context) error {
				_, err := e.Context(ctx).QueryString("select 1 from pg_sleep(60)")
				return err
			}},
			{name: "Exec in Begin", run: func(ctx context.Context) error {
				s := e.NewSession().Context(ctx)
				defer s.Close()
				if err := s.Begin(); err != nil {
					return err
				}
				_, err := s.Exec("select pg_sleep(60)")
				return err
			}},
		}}
	})
	t.Run("by name", func(t *testing.T) {
		_, err := xorm.NewEngine(pgxgated.DriverName, pgtest.Shared(t).DSN())
		worksNot(t, libXorm, "`xorm.NewEngine(\"pgx-gated\", …)`", "xorm takes the driver's name for the dialect's; use `xorm.NewEngineWithDB(\"pgx\", dsn, core.FromDB(db))`", err)
	})
}
